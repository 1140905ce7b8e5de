"""One paper, one file: each a short recipe of parts for the five slots."""
