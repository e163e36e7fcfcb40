"""The Jupyter kernel in a sandbox: provisioner, relay and channels."""
