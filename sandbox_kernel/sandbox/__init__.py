"""One sandbox: a hardened container with a lease (features B; security profile, section 2)."""
