"""Small things without a home of their own that need nothing heavy."""
