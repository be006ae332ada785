"""What serving with relay would gain: real servers side by side, under the same load."""
