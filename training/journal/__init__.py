"""What a run tells: log lines, curves, boards, and the figures in them."""
