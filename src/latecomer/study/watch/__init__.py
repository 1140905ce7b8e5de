"""`latecomer watch`: a web server with the live page of running and finished runs."""
