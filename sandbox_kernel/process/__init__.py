"""One command in a sandbox: its start, output, stop and result (``exec-wrapper``)."""
