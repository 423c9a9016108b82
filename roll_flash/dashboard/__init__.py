"""The dashboard: runs and evaluations in a browser, from their files, also while they are being written.

It only reads. `folders` finds runs; `episode_index` knows where each episode is; `episode_search` selects; `transcript`
prepares one episode; `timeline` shows where the time went; `server` answers a browser on this machine; `pages/` is the
front end, without a build step.
"""
