"""An operation a file: the torch reference first, then the function that picks the fastest implementation for its input."""
