"""What is made once from documents: dictionary, parsed text, chunks, prompt."""
