"""One paper, one file: each holds the recipes of that paper and the parts only it uses."""
