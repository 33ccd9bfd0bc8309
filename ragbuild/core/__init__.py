"""Plain types, settings, files, tokenizers, tables and plots; nothing here knows of a model or an index."""
