"""What flows from decoder block to decoder block, sequence by sequence, and what blocks are called with beside it."""
