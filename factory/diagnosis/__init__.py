"""Diagnosis: an anomaly's window is replayed under arms, its cause is named, and what the policy says is done.

``joined`` reads what new documents are like, ``bench`` replays (the doctor of ``agents/loss_doctor`` sees nothing else), ``diagnosing`` runs and
records a diagnosis, ``acting`` quarantines documents and rewinds, ``wording`` has a language model say what it shows.
"""
