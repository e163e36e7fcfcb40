"""IPython magics that run cells in sandboxes (imported as ``sandbox_magics``)."""
