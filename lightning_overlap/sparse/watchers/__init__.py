"""What watches the steps of a pipeline, a file for each watcher; `watcher.py` has the events.

The core tells each event to the watchers that want it, and knows nothing else of them. A watcher may raise an error.
"""
