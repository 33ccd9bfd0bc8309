"""Search structures: one lexical index, one dense index, and the versions that hold them."""
