-- Delete the keys ARGV.
for i = 2, #KEYS do
  local key = ARGV[i - 1]
  redis.call('HDEL', hash, '=' .. key)
  if redis.call('HDEL', hash, '!' .. key) == 1 then
    -- Wake the waiters, so that they mark the key again.
    publish(KEYS[i], next_number() .. '-0', 'd', '')
  end
end
