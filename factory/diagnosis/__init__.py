"""Diagnoses anomalies: replays the window of an anomaly in several arms, names the cause, and acts as the policy says.

``new_documents`` compares new documents with old ones. ``replay_bench`` replays; the doctor in ``agents/loss_doctor`` sees nothing else.
``diagnosing`` runs and records a diagnosis. ``remedies`` quarantines documents and rewinds segments. ``wording`` lets a language model describe a
diagnosis.
"""
