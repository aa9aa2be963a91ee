"""The page that a daemon shows of itself: a feed of what changes, and the files that draw it."""
