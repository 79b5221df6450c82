"""Removes old files so that a factory can run for months. It keeps all files that pending work needs.

``policy``    the keys of ``policies/retention.yaml``
``needs``     the files that pending work needs, from the ledger
``stored_folders``    the files of a workspace that could be removed
``choosing``  decides which files are removed, and why the others stay; a pure function
``cleaning``  removes them
``disk``      measures the free space on the disk
``low_disk``  frees space, and stops training, when the disk is almost full
"""
