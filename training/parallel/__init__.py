"""One GPT-2 over many processes, applied from outside: `layout` does it all in order, the others are its parts."""
