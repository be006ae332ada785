"""System and context attention: the two ops, and one module per provider of both."""
