-- Let the run expire after ARGV[1] milliseconds. ARGV[2] is what the names of its streams begin with.
for _, field in ipairs(redis.call('HKEYS', hash)) do
  if string.sub(field, 1, 1) == '!' then
    -- A stream keeps its own limit of 60 s.
    redis.call('PEXPIRE', ARGV[2] .. string.sub(field, 2), math.min(ARGV[1], 60000))
  end
end
-- An empty run gets a deadline too.
if tonumber(ARGV[1]) > 0 then next_number() end
redis.call('PEXPIRE', hash, ARGV[1])
