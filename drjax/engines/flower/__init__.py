"""What only Flower needs: groups that are clients, which are not trusted.

adapter                  `compile` and `client`: the server's half, and the clients'
client_data              what the server requests of clients that have their own data
assignment               which client has which group
claim_queries            the clients are asked which group they are
background               calls of Flower that must not hold up the driver
code_of_stages           the code that clients get, and lists of what may run
untrusted_replies        what clients send, validated against the plan
secure_sums              sums of which the server sees the total alone
secure_masks, secure_replies
                         their masks, and the replies of the protocol
"""
