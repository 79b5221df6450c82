"""What is removed so that a factory can run for months: by policy, never what something needs, the ledger first and the folder after.

``policy``    what ``policies/retention.yaml`` may say
``needs``     what the ledger's rows need to be gone on with
``stored``    what lies in the workspace that could go
``choosing``  what goes, and why the rest stays; pure
``cleaning``  does it
``disk``      how much room is left, for how long, and what happens when there is too little
"""
