"""What a judgement takes: memory, disk, and time."""
