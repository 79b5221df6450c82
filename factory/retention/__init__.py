"""Removes old files, so that a factory can run for months. All files that pending work needs are kept.

``policy``    reads the keys of ``policies/retention.yaml``
``needs``     finds the files that pending work needs, from the ledger
``stored_folders``   lists the files of a workspace that may be removed
``removal_decisions``  decides which files are removed, and why the others stay; a pure function
``cleaning``  removes them
``disk``      measures the free space on the disk
``low_disk``  frees space, and stops training, when the disk is almost full
"""
