"""Is `tree.budget: auto` ever slower than plain decoding, or than the best budget that anybody could have set?"""
