"""One question's way to an answer: rewrite, route, retrieve, rerank, generate."""
