"""What a block is: its bytes, and the levels at which it can be encoded."""
