"""Dockerfiles of the images that this package ships."""
