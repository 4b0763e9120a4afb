"""How many answers come in time when requests come at random, with plain decoding and with drafts?"""
