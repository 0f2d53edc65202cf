"""The history of a document: show, sample, trace; and its removal from a whole run."""
