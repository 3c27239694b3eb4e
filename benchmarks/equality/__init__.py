"""Do two checkouts train bit by bit alike?"""
