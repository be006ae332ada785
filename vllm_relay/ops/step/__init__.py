"""One layer's relay attention by a step's plan."""
