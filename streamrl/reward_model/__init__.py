"""The reward model that is served beside: a sequence classifier in processes of its own, and what asks it.

worker ── client.py ── HTTP, one call a group ──▶ service.py ─▶ batches.py ─▶ classifier.py (torch)
   ▲                                                 │
   └───────────── scores, or why not ────────────────┘      RUN/reward-model-N.address: where each listens
"""
