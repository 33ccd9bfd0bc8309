"""ragbuild: learn, build and run a domain-adaptive RAG system, in Chinese and English."""

__version__ = "0.1.0"
