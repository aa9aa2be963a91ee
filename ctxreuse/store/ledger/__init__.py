"""The durable text: sessions, turns, token ids."""
