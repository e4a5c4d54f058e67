"""What watches the steps of a pipeline, a file for each watcher; `watcher.py` has the events.

The core tells each event to the watchers that want it. A watcher may raise an error, and changes no answer.
"""
