"""Page bytes and small messages between daemons of different nodes.

base.py is the contract; tcp.py the implementation that needs nothing else.
"""
