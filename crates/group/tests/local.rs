//! Collectives between threads.

mod common;
use common::{config, contribution, digest, each, expected, value};
use kiln_group::{Call, Config, Error, Group, Loss, Op, Pending, Promise, Reduce};
use kiln_ir::DType;
use std::time::{Duration, Instant};

#[test]
fn any_number_of_ranks_gives_the_same_bits() {
    let want = expected();
    for ranks in [1, 2, 3, 4, 5, 7, 8] {
        let got = each(Group::local(ranks, config(8)).unwrap(), |group| digest(&group).unwrap());
        assert_eq!(got, vec![want; ranks], "{ranks} ranks");
    }
}

#[test]
fn sums_follow_the_tree_over_shards() {
    let n = 3000;
    let x: Vec<Vec<f32>> = (0..5)
        .map(|s| {
            value(s, DType::F32, n, 1).chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
        })
        .collect();
    for ranks in [1, 2, 3, 5] {
        let sums = each(Group::local(ranks, config(5)).unwrap(), |group| {
            let buffer = contribution(&group, Reduce::Sum, DType::F32, n, 1);
            group.all_reduce(Reduce::Sum, DType::F32, buffer).unwrap().wait().unwrap().to_vec()
        });
        for sum in sums {
            for (i, b) in sum.chunks(4).enumerate() {
                let want = ((x[0][i] + x[1][i]) + (x[2][i] + x[3][i])) + x[4][i];
                assert_eq!(f32::from_le_bytes(b.try_into().unwrap()).to_bits(), want.to_bits());
            }
        }
    }
}

#[test]
fn payload_is_twice_the_share_of_the_others() {
    let bytes = 4 << 20;
    for ranks in [2, 4, 8] {
        let traffic = each(Group::local(ranks, config(8)).unwrap(), |group| {
            let buffer = group.buffer(bytes).unwrap();
            group.all_reduce(Reduce::Sum, DType::F32, buffer).unwrap().wait().unwrap();
            group.barrier().unwrap();
            group.traffic()
        });
        for t in traffic {
            let bound = 1.02 * 2.0 * (ranks - 1) as f64 / ranks as f64 * bytes as f64;
            let moved = (t.read + t.written) as f64;
            assert!(moved <= bound && moved > 0.9 * bound, "{ranks} ranks moved {moved}, bound {bound}");
        }
    }
}

#[test]
fn what_all_have_contributed_to_is_there_after_an_end_too() {
    let groups = Group::local(2, config(2)).unwrap();
    let pending = groups
        .iter()
        .map(|group| group.all_reduce(Reduce::Sum, DType::U8, group.buffer_of(&[3]).unwrap()).unwrap());
    let mut pending: Vec<_> = pending.collect();
    let last = pending.pop().unwrap();
    assert_eq!(pending.pop().unwrap().wait().unwrap()[..], [6]);
    groups[0].abort("enough");
    assert_eq!(last.wait().unwrap()[..], [6]);
    assert!(matches!(groups[1].barrier(), Err(Error::Aborted { rank: 0, .. })));
}

#[test]
fn calls_that_differ_are_refused_before_data_mixes() {
    let call = |op, dtype| Call::new(op, dtype);
    let sum = Op::AllReduce(Reduce::Sum);
    let cases = [
        (call(sum, DType::F32), 64, call(Op::AllReduce(Reduce::Max), DType::F32), 64),
        (call(sum, DType::F32), 64, call(sum, DType::I32), 64),
        (call(sum, DType::F32), 64, call(sum, DType::F32), 128),
        (call(sum, DType::F32), 1 << 20, call(sum, DType::F32), 64),
        (call(sum, DType::F32), 1 << 20, call(sum, DType::F32).tagged(1), 1 << 20),
        (call(Op::Broadcast(0), DType::U8), 64, call(Op::Broadcast(1), DType::U8), 64),
        (call(Op::AllGather, DType::U8), 64, call(Op::ReduceScatter(Reduce::Sum), DType::U8), 64),
    ];
    for (a, a_bytes, b, b_bytes) in cases {
        let errors = each(Group::local(3, config(3)).unwrap(), |group| {
            let (call, bytes) = if group.rank() == 1 { (b, b_bytes) } else { (a, a_bytes) };
            let buffer = group.buffer(bytes).unwrap();
            let error = group.run(call, buffer).unwrap_err();
            assert_eq!(group.barrier(), Err(error.clone()), "the group is over");
            error
        });
        for error in errors {
            let Error::Mismatch { rank, mine, peer, theirs } = error else { panic!("{error}") };
            assert!(rank == 1 || peer == 1, "{rank} {peer}");
            assert_eq!((mine.sequence, theirs.sequence), (1, 1));
            assert_ne!(mine, theirs);
        }
    }
}

#[test]
fn a_skipped_call_is_told_by_its_signature() {
    let errors = each(Group::local(2, config(2)).unwrap(), |group| {
        let mut last = Ok(());
        for tag in 1..=5 {
            if group.rank() == 1 && tag == 3 {
                continue;
            }
            let call = Call::new(Op::AllReduce(Reduce::Sum), DType::F32).tagged(tag);
            last = group.run(call, group.buffer(256).unwrap()).map(drop);
            if last.is_err() {
                break;
            }
        }
        last.unwrap_err()
    });
    for error in errors {
        let Error::Mismatch { mine, theirs, .. } = error else { panic!("{error}") };
        assert_eq!((mine.sequence, mine.tag.min(theirs.tag), mine.tag.max(theirs.tag)), (3, 3, 4));
    }
}

#[test]
fn an_extra_call_ends_when_the_others_leave() {
    let errors = each(Group::local(2, config(2)).unwrap(), |group| {
        group.barrier().unwrap();
        let begun = Instant::now();
        if group.rank() == 0 {
            return (group.barrier().unwrap_err(), begun.elapsed());
        }
        (Error::Closed, begun.elapsed())
    });
    assert_eq!(errors[0].0, Error::RankLost { rank: 1, cause: Loss::Left { after: 1 } });
    assert!(errors[0].1 < Duration::from_millis(250));
}

#[test]
fn a_rank_that_panics_is_lost_for_the_others() {
    let groups = Group::local(3, config(3)).unwrap();
    let threads: Vec<_> = groups
        .into_iter()
        .map(|group| {
            std::thread::spawn(move || {
                group.barrier().unwrap();
                if group.rank() == 2 {
                    std::panic::resume_unwind(Box::new("as a test"));
                }
                group
                    .all_reduce(Reduce::Sum, DType::F32, group.buffer(1 << 20).unwrap())
                    .unwrap()
                    .wait()
                    .unwrap_err()
            })
        })
        .collect();
    let results: Vec<_> = threads.into_iter().map(|t| t.join()).collect();
    for result in results.into_iter().take(2) {
        assert_eq!(result.unwrap(), Error::RankLost { rank: 2, cause: Loss::Left { after: 1 } });
    }
}

#[test]
fn a_poisoned_contribution_fails_everywhere_and_the_group_lives() {
    for bytes in [64, 1 << 20] {
        let results = each(Group::local(3, config(3)).unwrap(), |group| {
            let mut buffer = group.buffer(bytes).unwrap();
            if group.rank() == 1 {
                buffer.poison("index 9 is out of range");
            }
            let error = group.all_reduce(Reduce::Sum, DType::F32, buffer).unwrap().wait().unwrap_err();
            let mut ones = group.buffer(bytes).unwrap();
            ones.iter_mut().for_each(|b| *b = 1);
            let sum = group.all_reduce(Reduce::Sum, DType::U8, ones).unwrap().wait().unwrap();
            assert!(sum.iter().all(|&b| b == 3));
            error
        });
        let want = Error::Poisoned { rank: 1, reason: "index 9 is out of range".into() };
        assert_eq!(results, vec![want; 3]);
    }
}

#[test]
fn a_rank_that_does_not_come_is_named_at_the_deadline() {
    let config = Config { deadline: Duration::from_millis(200), ..config(3) };
    let results = each(Group::local(3, config).unwrap(), |group| {
        if group.rank() == 2 {
            std::thread::sleep(Duration::from_millis(400));
        }
        let begun = Instant::now();
        let error =
            group.all_reduce(Reduce::Sum, DType::F32, group.buffer(64).unwrap()).unwrap().wait().unwrap_err();
        assert!(begun.elapsed() < Duration::from_secs(1));
        error
    });
    for error in results {
        let Error::Deadline { missing, .. } = error else { panic!("{error}") };
        assert_eq!(missing, [2]);
    }
}

#[test]
fn misuse_is_refused_at_the_call() {
    let group = Group::local(1, config(1)).unwrap().remove(0);
    let bool_sum = group.all_reduce(Reduce::Sum, DType::Bool, group.buffer(8).unwrap()).err();
    assert_eq!(bool_sum, Some(Error::Unsupported { reduce: Reduce::Sum, dtype: DType::Bool }));
    let odd = group.all_reduce(Reduce::Sum, DType::F32, group.buffer(7).unwrap()).err();
    assert_eq!(odd, Some(Error::Length { bytes: 7, dtype: DType::F32 }));
    let root = group.broadcast(1, DType::F32, group.buffer(8).unwrap()).err();
    assert_eq!(root, Some(Error::Member { rank: 1, ranks: 1 }));
    let other = Group::local(1, config(1)).unwrap().remove(0);
    let foreign = group.all_reduce(Reduce::Sum, DType::F32, other.buffer(8).unwrap()).err();
    assert_eq!(foreign, Some(Error::Foreign));
    group.close().unwrap();
    group.close().unwrap();
    assert_eq!(group.barrier(), Err(Error::Closed));
    assert_eq!(Group::local(3, config(2)).err(), Some(Error::Shards { shards: 2, ranks: 3 }));
}

#[test]
fn close_finishes_what_is_pending() {
    each(Group::local(2, config(2)).unwrap(), |group| {
        let pending: Vec<_> = (0..10)
            .map(|_| group.all_reduce(Reduce::Sum, DType::F32, group.buffer(1 << 17).unwrap()).unwrap())
            .collect();
        group.close().unwrap();
        pending.into_iter().for_each(|p| drop(p.wait().unwrap()));
    });
}

#[test]
fn results_that_nobody_waits_for_still_reach_the_others() {
    each(Group::local(2, config(2)).unwrap(), |group| {
        for i in 0..50 {
            let bytes = if i % 3 == 0 { 1 << 17 } else { 64 };
            let pending = group.all_reduce(Reduce::Sum, DType::F32, group.buffer(bytes).unwrap()).unwrap();
            if group.rank() == 1 || i == 49 {
                pending.wait().unwrap();
            }
        }
    });
}

#[test]
fn a_call_that_becomes_ready_while_another_is_driven_is_not_forgotten() {
    each(Group::local(2, config(2)).unwrap(), |group| {
        for i in 0..200 {
            let bytes = 1 << 17;
            let (promise, first) =
                group.promise(Call::new(Op::AllReduce(Reduce::Sum), DType::F32), bytes).unwrap();
            std::thread::scope(|scope| {
                let waits = scope.spawn(|| first.wait().map(drop));
                let second = group.all_reduce(Reduce::Sum, DType::F32, group.buffer(bytes).unwrap()).unwrap();
                promise.give().unwrap();
                waits.join().unwrap().unwrap();
                if group.rank() == 1 || i == 199 {
                    second.wait().unwrap();
                }
            });
        }
    });
}

/// A sum of four ranges of 64 KiB.
fn in_ranges(group: &Group) -> (Promise, Pending) {
    let call = Call::new(Op::AllReduce(Reduce::Sum), DType::F32);
    group.promise_cut(call, 4 << 16, &[1 << 16, 2 << 16, 3 << 16]).unwrap()
}

#[test]
fn a_range_is_exchanged_before_the_rest_is_there() {
    let ones = 1f32.to_le_bytes().repeat(1 << 16);
    each(Group::local(2, config(2)).unwrap(), |group| {
        let (mut promise, pending) = in_ranges(&group);
        assert_eq!(promise.put(0, 0, &ones[..1 << 16]), Ok(1 << 16));
        promise.reach((1 << 16) + 7).unwrap();
        let until = Instant::now() + Duration::from_secs(5);
        while group.traffic().read < 1 << 15 {
            assert!(Instant::now() < until, "it waits for the rest");
            std::thread::yield_now();
        }
        // What is given stays as it is, whatever comes for it.
        assert!(promise.range(0, 0..64).unwrap().is_none());
        assert_eq!(promise.put(0, 0, &ones), Ok(3 << 16));
        promise.give().unwrap();
        assert_eq!(*pending.wait().unwrap(), *2f32.to_le_bytes().repeat(1 << 16));
    });
}

#[test]
fn a_contribution_that_fails_half_way_fails_everywhere_and_the_group_lives() {
    let errors = each(Group::local(3, config(3)).unwrap(), |group| {
        let (mut promise, pending) = in_ranges(&group);
        promise.reach(2 << 16).unwrap();
        match group.rank() {
            1 => promise.fail("why"),
            _ => promise.give().unwrap(),
        }
        let error = pending.wait().unwrap_err();
        for salt in 0..4 {
            let sum = contribution(&group, Reduce::Sum, DType::F32, 1 << 16, salt);
            let sum = group.all_reduce(Reduce::Sum, DType::F32, sum).unwrap().wait().unwrap();
            let all = Group::local(1, config(3)).unwrap().remove(0);
            let want = contribution(&all, Reduce::Sum, DType::F32, 1 << 16, salt);
            assert_eq!(*sum, *want, "{salt}");
        }
        error
    });
    assert_eq!(errors, vec![Error::Poisoned { rank: 1, reason: "why".into() }; 3]);
}

#[test]
fn ranks_that_cut_differently_are_refused() {
    let errors = each(Group::local(2, config(2)).unwrap(), |group| {
        let call = Call::new(Op::AllReduce(Reduce::Sum), DType::F32);
        // The second ranges have the same length and begin elsewhere.
        let cuts = if group.rank() == 0 { [0, 1 << 16] } else { [1 << 16, 2 << 16] };
        let (promise, pending) = group.promise_cut(call, 4 << 16, &cuts).unwrap();
        promise.give().unwrap();
        pending.wait().unwrap_err()
    });
    assert!(errors.iter().all(|e| matches!(e, Error::Mismatch { .. })), "{errors:?}");
    let group = Group::local(1, config(1)).unwrap().remove(0);
    let refused =
        |cuts: &[usize]| group.promise_cut(Call::new(Op::AllReduce(Reduce::Sum), DType::F32), 64, cuts).err();
    for (cuts, wrong) in [(&[32, 16][..], 32), (&[2], 2), (&[4, 128], 128)] {
        assert_eq!(refused(cuts), Some(Error::Length { bytes: wrong, dtype: DType::F32 }));
    }
    assert_eq!(group.flight().records.len(), 0, "nothing was begun");
}

/// Each of 8 groups is used by a thread of its own; the threads of a rank are served in any order.
#[test]
fn a_thousand_schedules_of_concurrent_groups() {
    let seed = kiln_env::SEED.get().unwrap_or(1);
    println!("KILN_SEED={seed} cargo test -p kiln-group --test local a_thousand");
    each(Group::local(3, config(3)).unwrap(), |group| {
        let names: Vec<String> = (0..8).map(|i| format!("g{i}")).collect();
        let groups: Vec<Group> =
            names.iter().map(|name| group.subgroup(name, &[2, 0, 1], None).unwrap()).collect();
        for schedule in 0..1000u64 {
            let mut state = seed ^ schedule << 8 ^ (group.rank() as u64) << 32;
            let mut random = move || {
                state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
                let z = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
                (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb) >> 33
            };
            let mut order: Vec<usize> = (0..8).collect();
            for i in (1..8).rev() {
                order.swap(i, random() as usize % (i + 1));
            }
            let threads = 1 + random() as usize % 3;
            std::thread::scope(|scope| {
                for share in order.chunks(8usize.div_ceil(threads)) {
                    let groups = &groups;
                    scope.spawn(move || {
                        let start = |&i: &usize| {
                            let bytes = if (schedule as usize + i).is_multiple_of(4) { 20_000 } else { 40 };
                            let mut buffer = groups[i].buffer(bytes).unwrap();
                            buffer.fill((i + 1) as u8);
                            (i, groups[i].all_reduce(Reduce::Sum, DType::U8, buffer).unwrap())
                        };
                        let mut pending: Vec<_> = share.iter().map(start).collect();
                        pending.reverse();
                        for (i, pending) in pending {
                            let sum = pending.wait().unwrap();
                            assert!(
                                sum.iter().all(|&b| b == 3 * (i + 1) as u8),
                                "group {i}, schedule {schedule}"
                            );
                        }
                    });
                }
            });
        }
    });
}

#[test]
fn the_flight_record_has_the_line_of_the_call() {
    let dumps = each(Group::local(2, config(2)).unwrap(), |group| {
        for _ in 0..kiln_group::KEPT + 5 {
            group.barrier().unwrap();
        }
        group.flight()
    });
    for dump in dumps {
        assert_eq!(dump.records.len(), kiln_group::KEPT);
        let last = dump.records.last().unwrap();
        assert_eq!(last.signature.sequence, kiln_group::KEPT as u64 + 5);
        assert!(last.line.contains("local.rs"), "{}", last.line);
    }
}
