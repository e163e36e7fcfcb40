"""The image for R kernels: a Dockerfile."""
