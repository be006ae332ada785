"""Side-by-side comparison of servers with and without relay under the same load."""
