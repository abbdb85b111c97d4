"""What is stored: segment identity, the page pool, and the store that knows who holds which
page.
"""
