"""Tables of published numbers of papers, beside the predicted numbers."""
