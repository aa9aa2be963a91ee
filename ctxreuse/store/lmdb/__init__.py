"""LMDB environments: opening, locking, ownership, recovery."""
