"""pdb on ranks: code that stops at a breakpoint or after an error, and the prompts of the program for it."""
