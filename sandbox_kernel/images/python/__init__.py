"""The image for Python kernels: a Dockerfile and the files that go into it."""
