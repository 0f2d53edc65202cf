"""What happened to a document: show, sample, trace, and its removal from a whole run."""
