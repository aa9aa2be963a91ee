"""Who may connect: CURVE keys and the allow-list."""
