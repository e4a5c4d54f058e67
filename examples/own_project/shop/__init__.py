"""A small recommender: which visitors of a shop click on which items."""
