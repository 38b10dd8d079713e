# HTTPS only, and nothing without a token. Every Consul from 1.7 on knows these names; later ones
# call them deprecated.
ports {
  http  = -1
  https = 8501
}

cert_file = "/tls/server.pem"
key_file  = "/tls/server.key"
ca_file   = "/tls/ca.pem"

acl {
  enabled        = true
  default_policy = "deny"

  tokens {
    master = "5b3f9a52-7c3e-4f0e-9d0a-2f6f5f1c8e11"
  }
}
