"""IPython magics that run cells in sandboxes (imported as ``sandbox_magics``).

The magics themselves are not written yet; the package exists so that its import name and the
one-way dependency on :mod:`sandbox_kernel` are fixed from the start.
"""
