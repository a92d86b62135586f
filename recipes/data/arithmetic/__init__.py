"""The arithmetic set that ships with the package, made for a two-layer model that starts from random weights."""
